"""Models and machines as facts. Parameter counts are computed and checked against the published.

Bandwidths are bytes/s in one direction; vendors often print both directions together.
"""

from dataclasses import dataclass, replace

from zerolab.theory.values import one_of, whole


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, or (`given`) a bare number of parameters.

    GPT-2 style has biases, layer norms, learned positions and tied tables; `gated` is Llama's style
    with three MLP matrices, RMS norms, no biases and an output table of its own.
    """

    name: str
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    vocabulary: int = 0
    sequence: int = 0
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    experts: int = 1
    active_experts: int = 1
    published: str = ""  # exact, or rounded as in "175e9"
    given: int = 0

    def _block(self, experts: int) -> int:
        h = self.hidden
        if not self.gated:
            return 12 * h**2 + 13 * h  # weights 3 + 1 + 4 + 4; biases 3 + 1 + 4 + 1, norms 4
        attention = 2 * h * h + 2 * h * (h // self.heads) * self.kv_heads
        router = h * self.experts if self.experts > 1 else 0
        return attention + 3 * h * self.ffn * experts + router + 2 * h

    @property
    def root(self) -> int:
        """Parameters outside the blocks: tables, positions, the last norm; a tied pair once."""
        h, tables = self.hidden, self.vocabulary * self.hidden
        return 2 * tables + h if self.gated else tables + self.sequence * h + 2 * h

    @property
    def units(self) -> tuple[int, ...]:
        """Sizes of what is gathered together: the root, then each block."""
        blocks = (self._block(self.experts),) * self.layers
        return (self.given,) if self.given else (self.root, *blocks)

    @property
    def params(self) -> int:
        return sum(self.units)

    @property
    def active_params(self) -> int:
        """Parameters that compute for one token; fewer than all in a mixture of experts."""
        return self.given or self.root + self.layers * self._block(self.active_experts)


_GPT2, _LLAMA2, _LLAMA3 = (50257, 1024), (32000, 4096), (128256, 8192)  # vocabulary, sequence
_MODELS = (  # layers, hidden, heads, …: the papers and the released checkpoints
    Model("gpt2", 12, 768, 12, *_GPT2, published="124439808"),
    Model("gpt2-medium", 24, 1024, 16, *_GPT2, published="354823168"),
    Model("gpt2-large", 36, 1280, 20, *_GPT2, published="774030080"),
    Model("gpt2-xl", 48, 1600, 25, *_GPT2, published="1557611200"),
    Model("gpt3-175b", 96, 12288, 96, 50257, 2048, published="175e9"),
    Model("llama2-7b", 32, 4096, 32, *_LLAMA2, 11008, 32, True, published="6738415616"),
    Model("llama2-13b", 40, 5120, 40, *_LLAMA2, 13824, 40, True, published="13015864320"),
    Model("llama2-70b", 80, 8192, 64, *_LLAMA2, 28672, 8, True, published="68976648192"),
    Model("llama3-8b", 32, 4096, 32, *_LLAMA3, 14336, 8, True, published="8030261248"),
    Model("llama3-70b", 80, 8192, 64, *_LLAMA3, 28672, 8, True, published="70553706496"),
    Model("llama3-405b", 126, 16384, 128, *_LLAMA3, 53248, 8, True, published="405853388800"),
    Model("mixtral-8x7b", 32, 4096, 32, 32000, 32768, 14336, 8, True, 8, 2, "46702792704"),
)
MODELS = {model.name: model for model in _MODELS}


def model(which: str | float | Model) -> Model:
    """A model by name, by a number of parameters, or as it is."""
    if isinstance(which, str):
        return MODELS[one_of("Model", which, MODELS)]
    if isinstance(which, Model):
        return which
    return Model(f"{which:.0f} parameters", given=whole("params", which, 1))


LINKS = {  # bytes/s in one direction, and the source
    "nvlink2": (150e9, "V100; printed as 300 for both directions"),
    "nvlink3": (300e9, "A100; printed as 600; all-reduce measured at 235"),
    "nvlink4": (450e9, "H100; printed as 900"),
    "pcie3": (16e9, "x16, unchecked; 10 to 12 achieved (ZeRO-Infinity)"),
    "pcie4": (31e9, "x16"),
    "pcie5": (63e9, "x16"),
    "infiniband-edr": (12.5e9, "one link (ZeRO)"),
}


@dataclass(frozen=True)
class Gpu:
    """Memory in decimal bytes as its name says; dense bf16 (V100: fp16) FLOP/s; a link's name."""

    memory_bytes: int
    flops_per_s: float
    link: str


GPUS = {  # vendor data sheets; the V100's FLOP/s are unchecked
    "v100-32": Gpu(32 * 10**9, 125e12, "nvlink2"),
    "a100-80": Gpu(80 * 10**9, 312e12, "nvlink3"),
    "h100-80": Gpu(80 * 10**9, 989e12, "nvlink4"),
}


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. 0 bytes or bytes/s means: none, or not given.

    `host_bytes_per_s` is per GPU while all use it, the disk's and network's are per node.
    """

    name: str
    gpus_per_node: int
    nodes: int = 1
    gpu: str = ""
    cpu_bytes: int = 0
    nvme_bytes: int = 0
    host_bytes_per_s: float = 0
    nvme_bytes_per_s: float = 0
    network_bytes_per_s: float = 0
    source: str = ""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def link_bytes_per_s(self, ranks: int) -> float:
        """What one rank can send in a ring of `ranks` neighbours."""
        if ranks <= self.gpus_per_node:
            return LINKS[GPUS[self.gpu].link][0]
        return self.network_bytes_per_s / self.gpus_per_node


_NODES = (
    Cluster("dgx2", 16, 1, "v100-32", 15 * 10**11, 28 * 10**12, 3e9, 25e9, 100e9,
            "ZeRO-Infinity figure 2b and §5.2"),
    Cluster("dgx-a100", 8, 1, "a100-80", 2 * 10**12, 28 * 10**12, 12e9, 25e9, 200e9,
            "2 TB of memory; disks as in a DGX-2, host link and network unchecked"),
    Cluster("dgx-h100", 8, 1, "h100-80", 2 * 10**12, 28 * 10**12, 25e9, 25e9, 400e9, "unchecked"),
)  # fmt: skip
NODES = {node.name: node for node in _NODES}


def cluster(which: str | int | Cluster, nodes: int = 1) -> Cluster:
    """A cluster of known nodes, a bare number of ranks, or as it is."""
    if isinstance(which, str):
        return replace(NODES[one_of("Node", which, NODES)], nodes=whole("nodes", nodes, 1))
    if isinstance(which, Cluster):
        return which
    return Cluster(f"{which} ranks", whole("ranks", which, 1))

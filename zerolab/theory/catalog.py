"""Models and machines as facts. Parameter counts are computed and checked against the published.

Every bandwidth here is bytes/s in one direction; what vendors print is often both together.
"""

from dataclasses import dataclass, replace

from zerolab.theory.values import one_of, whole


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, or (`given`) a bare number of parameters.

    GPT-2 style has biases, layer norms and learned positions; `gated` is Llama's style with three
    MLP matrices, RMS norms and no biases. `tied` input and output tables are one parameter.
    """

    name: str
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    vocabulary: int = 0
    sequence: int = 0
    source: str = ""
    published: str = ""  # exact, or rounded as in "175e9"
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
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
        tables = (1 if self.tied else 2) * self.vocabulary
        return (tables + 1 if self.gated else tables + self.sequence + 2) * self.hidden

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


_HUB = "architecture and count of the released checkpoint on the Hugging Face hub"
_GPT2, _LLAMA2 = (50257, 1024, _HUB), (32000, 4096, _HUB)  # vocabulary, sequence
_LLAMA3, _MIXTRAL = (128256, 8192, _HUB), (32000, 32768, _HUB)
_GPT3 = (50257, 2048, "Brown et al., arXiv 2005.14165, table 2.1")
_MODELS = (  # layers, hidden, heads, vocabulary, sequence, source, published; ffn, kv_heads, gated
    Model("gpt2", 12, 768, 12, *_GPT2, "124439808", tied=True),
    Model("gpt2-medium", 24, 1024, 16, *_GPT2, "354823168", tied=True),
    Model("gpt2-large", 36, 1280, 20, *_GPT2, "774030080", tied=True),
    Model("gpt2-xl", 48, 1600, 25, *_GPT2, "1557611200", tied=True),
    Model("gpt3-175b", 96, 12288, 96, *_GPT3, "175e9", tied=True),
    Model("llama2-7b", 32, 4096, 32, *_LLAMA2, "6738415616", 11008, 32, True),
    Model("llama2-13b", 40, 5120, 40, *_LLAMA2, "13015864320", 13824, 40, True),
    Model("llama2-70b", 80, 8192, 64, *_LLAMA2, "68976648192", 28672, 8, True),
    Model("llama3.2-1b", 16, 2048, 32, 128256, 131072, _HUB, "1235814400", 8192, 8, True, True),
    Model("llama3-8b", 32, 4096, 32, *_LLAMA3, "8030261248", 14336, 8, True),
    Model("llama3-70b", 80, 8192, 64, *_LLAMA3, "70553706496", 28672, 8, True),
    Model("llama3-405b", 126, 16384, 128, *_LLAMA3, "405853388800", 53248, 8, True),
    Model("mixtral-8x7b", 32, 4096, 32, *_MIXTRAL, "46702792704", 14336, 8, True, False, 8, 2),
)
MODELS = {model.name: model for model in _MODELS}


def model(which: str | float | Model, tied: bool | None = None) -> Model:
    """A model by name, by a number of parameters, or as it is; `tied` overrides its tables."""
    if isinstance(which, str):
        found = MODELS[one_of("Model", which, MODELS)]
    elif isinstance(which, Model):
        found = which
    else:
        params = whole("params", which, 1)
        found = Model(f"{params} parameters", given=params)
    if tied in (None, found.tied):
        return found
    if found.given:
        raise ValueError("A bare number of parameters has no tables to tie; a named model has.")
    return replace(found, name=f"{found.name}, {'tied' if tied else 'untied'}", tied=tied)


@dataclass(frozen=True)
class Link:
    """What one GPU can send, bytes/s in one direction; `printed` is the vendor's figure."""

    bytes_per_s: float
    printed: float
    one_way: bool  # what `printed` counts: one direction, or both together
    source: str


_BOOK = "ml-engineering, network: intra-node tables"
LINKS = {
    "nvlink2": Link(150e9, 300e9, False, f"{_BOOK}; V100"),
    "nvlink3": Link(300e9, 600e9, False, f"{_BOOK}; A100, all-reduce measured at 235e9"),
    "nvlink4": Link(450e9, 900e9, False, f"{_BOOK}; H100"),
    "pcie3": Link(15.75e9, 15.75e9, True, "16 lanes of 8 GT/s, 128 of 130 bits; 10 to 12e9 seen"),
    "pcie4": Link(31e9, 62e9, False, f"{_BOOK}; 16 lanes"),
    "pcie5": Link(63e9, 126e9, False, f"{_BOOK}; 16 lanes"),
    "infiniband-edr": Link(12.5e9, 12.5e9, True, "one link of 100 Gb/s (ZeRO §10.1)"),
}


@dataclass(frozen=True)
class Gpu:
    """Memory in decimal bytes as its name says; dense 16-bit FLOP/s; links by name."""

    memory_bytes: int
    flops_per_s: float
    link: str
    host: str
    source: str


GPUS = {
    "v100-32": Gpu(32 * 10**9, 125e12, "nvlink2", "pcie3", "NVIDIA blog: Tensor Cores; fp16"),
    "a100-80": Gpu(80 * 10**9, 312e12, "nvlink3", "pcie4", "ml-engineering, accelerators"),
    "h100-80": Gpu(80 * 10**9, 989e12, "nvlink4", "pcie5", "ml-engineering, accelerators"),
}


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. 0 bytes or bytes/s means: none, or not given.

    `host_bytes_per_s` is per GPU while all use it, the disk's and network's are per node.
    `rank_bytes_per_s`, where given, is what each rank sends, whatever its neighbour.
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
    rank_bytes_per_s: float = 0

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def link_bytes_per_s(self, ranks: int) -> float:
        """What one rank can send in a ring of `ranks` neighbours; 0 where it is not given."""
        inside = LINKS[GPUS[self.gpu].link].bytes_per_s if self.gpu else 0.0
        between = self.network_bytes_per_s / self.gpus_per_node
        return self.rank_bytes_per_s or (inside if ranks <= self.gpus_per_node else between)


_NODES = (
    Cluster("dgx2", 16, 1, "v100-32", 15 * 10**11, 28 * 10**12, 3e9, 25e9, 100e9,
            "ZeRO-Infinity figure 2b and §5.2; eight EDR links"),
    Cluster("dgx-a100", 8, 1, "a100-80", 2 * 10**12, 30 * 10**12, 15.5e9, 25e9, 200e9,
            "unchecked: 2 TB, 30 TB, 8 x 200 Gb/s; MLPerf v3.0, DGX A100: two GPUs "
            "share a PCIe 4 bridge; disk speed unchecked, the DGX-2's"),
    Cluster("dgx-h100", 8, 1, "h100-80", 2 * 10**12, 30720 * 10**9, 63e9, 25e9, 400e9,
            "NVIDIA DGX BasePOD: 2 TB, 8 x 3.84 TB, 8 x 400 Gb/s; MLPerf, DGX H100: each GPU has "
            "a PCIe 5 link, here at its peak; disk speed unchecked, the DGX-2's"),
)  # fmt: skip
NODES = {node.name: node for node in _NODES}


def cluster(which: str | int | Cluster, nodes: int = 1) -> Cluster:
    """A cluster of known nodes, a bare number of ranks, or as it is."""
    if isinstance(which, str):
        return replace(NODES[one_of("Node", which, NODES)], nodes=whole("nodes", nodes, 1))
    if isinstance(which, Cluster):
        return which
    return Cluster(f"{which} ranks", whole("ranks", which, 1))

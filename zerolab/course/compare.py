"""One question under every recipe, and what public calculators answer, explained by convention."""

from dataclasses import dataclass

from zerolab.theory.memory import RECIPES, held_bytes
from zerolab.theory.values import whole


@dataclass(frozen=True)
class Answer:
    """Bytes per GPU that someone states for the same question, and why they differ."""

    who: str
    num_bytes: int
    convention: str


def deepspeed_gpu_bytes(stage: int, params: int, ranks: int, largest: int = 0,
                        offload: str = "none", docs: bool = False) -> int:  # fmt: skip
    """DeepSpeed's estimators: code since PR 5099, or docs. `offload` is none, optimizer or both."""
    if stage == 3:
        parts = {"none": 18 * params // ranks, "optimizer": 2 * params // ranks, "both": 0}
        return 4 * largest + parts[offload]
    if offload != "none":
        return 2 * params
    whole_part, shared = (4, 16) if docs else (2, 18)
    return whole_part * params + shared * params // ranks


def deepspeed_host_bytes(stage: int, params: int, per_node: int, nodes: int = 1,
                         offload: str = "optimizer", at_start: bool = False) -> int:  # fmt: skip
    """DeepSpeed's host rule, with its factor 1.5; `at_start` where every process loads a copy.

    16 bytes a parameter, 18 with parameters offloaded at stage 3; at the start at least 4 for each
    process. Stage 2 has no sharded start, and keeps all of a node's bytes on every node.
    """
    share = 1 if stage < 3 else nodes
    steady = (18 if offload == "both" and stage == 3 else 16) * params // share
    processes = per_node * (nodes if stage < 3 else 1)
    return max(steady, 4 * processes * params if at_start else 0) * 3 // 2


def compare(params: float, ranks: int, stage: int, largest_layer: int = 0) -> tuple[Answer, ...]:
    """Our recipes first, then the calculators (without activations)."""
    size, n = whole("params", params, 1), whole("ranks", ranks, 1)
    ours = [Answer(r.name, held_bytes(stage, n, size, r)["total"], f"{r.total} bytes; {r.source}")
            for r in RECIPES.values()]  # fmt: skip
    fp32_grads = held_bytes(stage, n, size, "adamw-mixed-fp32-grads")["total"]
    buffers = (10**9 if stage and n > 1 else 0) + (2 * 10**9 if stage == 3 and n > 1 else 0)
    claims = [
        Answer("accelerate estimate-memory, fp32", 16 * size,
               "its largest phase, the step: 4 + 4 + 8; knows no ranks"),
        Answer("accelerate estimate-memory, fp16", 8 * size,
               "its largest phase, two fp32 moments (8), without adding weights and gradients; "
               "knows no ranks"),
        Answer("EleutherAI cookbook", fp32_grads + buffers,
               "fp32 gradients (18); 5e8-element bucket, 1e9 live parameters at stage 3; with "
               "tensor parallelism its stage 3 divides parameters twice and loses some"),
        Answer("llm-analysis", fp32_grads, "fp32 gradients (18); no buffers"),
    ]  # fmt: skip
    if stage >= 2:
        claims.append(Answer("DeepSpeed estimator, code",
                             deepspeed_gpu_bytes(stage, size, n, largest_layer),
                             "an fp32 gradient beside the 16-bit one (20); stage 3 omits the "
                             "16-bit one (18) and adds 4 bytes of the largest layer"))  # fmt: skip
    if stage == 2:
        claims.append(Answer("DeepSpeed estimator, docs",
                             deepspeed_gpu_bytes(stage, size, n, docs=True),
                             "16-bit gradients whole, as if stage 1"))  # fmt: skip
    return (*ours, *claims)

"""What must be true: every number of the course, derived. Never imports torch.

Bytes are exact integers, per rank; traffic is bytes sent per rank and step; GB is 1e9 bytes.
"""

# ruff: noqa: F401, I001 -- this file only lists the public names of the formula lessons

from zerolab.theory.derivation import Derivation
from zerolab.theory.memory import RECIPES, Recipe, derive_16psi, derive_k, derive_limit
from zerolab.theory.memory import derive_stage, held, held_bytes, padding
from zerolab.theory.memory import recipe_named
from zerolab.theory.notation import COLLECTIVES, COMPONENTS, KINDS, STAGES, notation_table
from zerolab.theory.traffic import derive_accumulation, derive_hybrid, derive_ratio, derive_ring
from zerolab.theory.traffic import derive_sent, derive_three_times, ring_time_s, sent, sent_bytes

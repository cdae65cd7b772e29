"""One check for each exercise: `check(id, answer)` says what is right or wrong and why."""

import importlib
import pkgutil

from zerolab.course.checks.core import EXERCISES, Verdict, check, given, hint

__all__ = ["EXERCISES", "Verdict", "check", "given", "hint"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)  # a lesson's module registers its exercises

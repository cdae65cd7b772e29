"""Grades notebooks: learners' code runs in a sandbox, verdicts are made where none of it ran.

`cells` (in a sandbox) runs a notebook and holds its answers; `ranks` (in a sandbox of its own) runs
a trial on ranks; `judging`, in the grader's own process, asks both and judges. Between them go JSON
and raw bytes, see `codec`; nothing that a learner's code wrote is ever unpickled by the grader.
"""

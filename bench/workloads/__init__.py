"""Trainings that run for real on a CPU, each as its user would write it, and how fast they get.

`python -m bench.workloads` measures them; `docs/workloads.md` says what each one is.
"""

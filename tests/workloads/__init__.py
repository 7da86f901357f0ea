"""Workloads whose truth is known, to compare a profiler's findings with.

`scenarios` runs the truth server (A/B models, real loads, own phase stamps); `counted` does an
exact number of things.  All stays on loopback, ends by itself, and takes its children with it.
"""

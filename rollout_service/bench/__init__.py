"""`rollout-service bench`: what the parts of a run cost, each against the plain way to do the same.

One module per subject; its `measure(repetitions)` returns a Report. Imported lazily by the command line, since most
subjects need torch. No figure made here is ever asserted.
"""

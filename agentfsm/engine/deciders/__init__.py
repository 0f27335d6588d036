"""Features of agents, one file each, at the fixed points of a run; `engine/line.py` has their order."""

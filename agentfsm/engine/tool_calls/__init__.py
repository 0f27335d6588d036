"""ACT: approvals, calls, what became of them, and the runs of sub-agents."""

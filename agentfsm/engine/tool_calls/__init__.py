"""ACT: approvals, calls, their outcomes, and the runs of sub-agents."""

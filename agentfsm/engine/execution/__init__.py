"""One driving call: its journal under a lease, what may be spent, which tools are there, what the answer has to be."""

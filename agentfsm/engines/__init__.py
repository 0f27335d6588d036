"""Execution engines beyond one database loop: they decide when and where a run is executed.

An engine dispatches. The journal with its lease remains the truth, so an engine may start a run twice without doubling
an effect. `agentfsm.engines.dbos` has the engine on DBOS; it needs agentfsm[dbos].
"""

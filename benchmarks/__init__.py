"""What agentfsm costs, as a ratio to a bare hand-written loop measured in the same process."""

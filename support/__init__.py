"""What a reader may skip: starting processes, agreeing before sending, the record of a run, rounding, colours."""

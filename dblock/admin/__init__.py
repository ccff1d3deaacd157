"""What an operator calls: the schema, privileges, tokens, the reaper, inspection and the doctor."""

"""The operator's functions: schema, privileges, tokens, the reaper, inspection and the doctor."""

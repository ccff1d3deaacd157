"""The operator's functions: schema, privileges, tokens, the reaper, inspection, the doctor and the probe."""

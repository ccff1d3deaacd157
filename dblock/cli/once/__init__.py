"""Schedules on the command line: `dblock once` runs a command, `dblock schedules` shows and changes schedules."""

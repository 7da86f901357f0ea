"""Opens, sets, loads, attaches and reads the probes. Nothing here knows what an event means."""

"""The embedded default: every part real, on one machine, on loopback."""

"""Nothing here reaches a network other than loopback."""

"""How things are timed: entries, checks against float64, clocks, memory and operation counts."""

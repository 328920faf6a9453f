"""What several test files share.

``cli`` starts commands, ``errors`` checks how they fail, ``screen`` shows what a terminal shows.
``runs`` trains small runs, ``sample_runs`` makes run folders up, ``server`` serves files.
``methods`` makes layers of every method, ``families`` reflection vectors that are hard on a compact
WY transform, and ``largest`` finds the largest tensor of a computation.
"""

"""What several test files share.

``cli`` starts commands, ``errors`` checks how they fail, ``screen`` shows what a terminal shows.
``runs`` trains small runs, ``sample_runs`` makes run folders up, ``server`` serves files.
``methods`` makes layers of every method, ``families`` reflection vectors that are hard on a compact
WY transform, ``recurrence`` inputs of a recurrence, and ``bench`` benchmarks of tiny sizes.
``torch_tables`` holds torch's own tables, and ``largest`` finds the largest tensor of a
computation. ``simulated_gpu`` runs simple CUDA kernels on a CPU, and ``language`` is a small one to
translate.
"""

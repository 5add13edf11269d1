"""Compiles every kernel for TPUs and GPUs without having them: `python -m pallas_kernels.aot`.

The real compilers come as wheels (`libtpu`; the CUDA plugin with `ptxas`), and a topology description replaces the
hardware. What compiles fits the chip: Mosaic enforces its VMEM limit and Triton its shared memory limit. From the
compiled programs the report reads how many bytes each kernel moves, compared with XLA's compilation of the reference,
and checks that a sharded training step communicates nothing but sums of gradients.

    targets.py   the chips, and what has to be installed for each
    traffic.py   bytes and collectives of a compiled program, from its text
    cases.py     what is compiled, and what must be true of it
    ptx.py       assembles the PTX that jax_triton writes
    step.py      the sharded training step
    worker.py    compiles cases for one target in a process of its own
    runner.py    starts workers, limits the time of each compilation, collects results
    report.py    the table
"""

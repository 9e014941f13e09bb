"""Reproduces the Hanayo paper (SC'23, doi 10.1145/3581784.3607073) by simulation, and fills the pages that show it.

`python -m recipes.paper` rewrites the tables of `docs/reproduction.md` and `docs/concepts/schedules.md`, and their
figures. It needs no torch and no GPU. It takes several minutes, nearly all of them for searching orders under small
budgets, with messages and with slow stages. Each module answers one question:

    bubbles     Fig 1's bubble ratios            waves     the best number of waves
    clusters    the 8-GPU throughputs            scaling   several pipelines in parallel
    variance    memory over the ranks            peers     the least idle time in equal memory
    uneven      the same with messages and slow stages
"""

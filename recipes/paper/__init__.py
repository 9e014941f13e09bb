"""Paper: Hanayo (SC'23, doi 10.1145/3581784.3607073) reproduced by simulation, and the pages that show it.

`python -m recipes.paper` rewrites the tables of `docs/reproduction.md` and `docs/concepts/schedules.md`, and their
figures. It needs no torch and no GPU. Nearly all of its several minutes go into the search for orders under smaller
budgets, messages and slow stages. Each budget below is one question put to the paper:

    bubbles     Fig 1's bubble ratios            waves     the best number of waves
    clusters    the 8-GPU throughputs            scaling   more pipelines side by side
    variance    memory over the ranks            peers     who idles least in the same memory
    uneven      the same with messages and slow stages
"""

"""Reproduces two papers by simulation, and fills the pages that show it.

Hanayo (SC'23, doi 10.1145/3581784.3607073) and 3-D tensor parallelism (arXiv 2105.14450). `python -m recipes.paper`
rewrites the tables of `docs/reproduction.md` and `docs/concepts/schedules.md`, and their figures. It needs no GPU, and
torch only for the 3-D paper. It takes several minutes, nearly all of them for searching orders under small budgets,
with messages and with slow stages. Each module answers one question:

    bubbles     Fig 1's bubble ratios                            waves    the best number of waves
    clusters    the 8-GPU throughputs, and several pipelines     search   the best layout of 32 devices
    ranks       what every rank holds, and its variance          peers    the least idle time in equal memory
    uneven      it with messages and with slow stages            cube_steps    the model of 3-D's steps
    cube_scaling    1-D, 2-D and 3-D on 1 to 64 ranks            cube_share    the 3-D paper's two ratios on 64 GPUs
"""

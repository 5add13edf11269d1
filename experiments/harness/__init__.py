"""Code that all recipes share: jobs that resume, sweeps over processes and machines, statistics, result files, the
table.

A recipe is one file in `experiments/`. Its docstring has the fields of `recipe.FIELDS`, and `Known: SIZE, SIZE: what`
if some of its runs were known when the claim was made. It defines the following; for a comparison of trained models all
except SIZES come from `comparison.Comparison`, and verdicts always come from `verdicts`:

    SIZES      its settings by size, frozen dataclasses; at least "smoke" and "cpu"
    plan       settings -> the jobs to run (`jobs.Job`)
    summarise  settings, records of all jobs -> `results.Summary`
    draw       settings, records -> a matplotlib figure

`docs/reproduce.md` names it; `python -m experiments`, the README's table and the contract test find it by its file.
"""

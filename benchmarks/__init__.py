"""What the locks cost: `python -m benchmarks [NAME …] [--quick] [--json FILE] [--postgres URL]
[--redis URL]`.

Everything is measured in pairs, round by round, with the contenders of a round one after the other
and in turn; what counts is the median of the rounds' ratios, which the machine and its other
work hardly change. Times stand beside them only to give an idea.
"""

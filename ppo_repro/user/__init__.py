"""The user's code in Python files, and what guards a run against its mistakes.

`file.py` loads a file and names its mistakes. Rewards, tasks and engines run in a child process: `process.py` is the
run's side, `child.py` the child's, and `conventions.py` says what each kind of function gets and returns. Functions on
tensors run in the process of the run: `functions.py` calls them and checks their results, `trial.py` tries them before
the run, and `operations.py` knows which operations have the same bits on every machine.
"""

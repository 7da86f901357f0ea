"""Controlled experiments: the same request under stated conditions, again and again, and a verdict.

    plan → schedule → run (prepare, verify, record, ask) → store → digest → statistics → verdict

`plan` says what is to be done, `runner` does it and appends what came out to `store`; everything
after that is pure and can be done again from the stored runs.
"""

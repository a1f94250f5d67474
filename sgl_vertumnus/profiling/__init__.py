"""``sgl-vertumnus profile``: how long prefills take on a live pool, and what its workers bear.

``plan`` says what to measure, ``live_pool`` and ``reports`` speak with the pool, ``measure`` goes
through the plan, ``record`` keeps every measurement as it is made, ``fit`` turns them into
coefficients, ``capacity`` and ``load`` find κ, ``result`` writes the profile.
"""

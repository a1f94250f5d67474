"""The runtime inside SGLang's processes: what the patches call.

A rank is a ``RankRuntime``, the data-parallel controller runs a ``Supervisor``, the launching
process owns the ``front``. ``plugin`` binds them when SGLang loads its plugins.
"""

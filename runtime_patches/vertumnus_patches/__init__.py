"""Patches on SGLang, and the only code that names SGLang's internals.

``record`` says what a patch is, ``patches/`` holds one file per patch, ``install`` checks and
applies them, ``engine`` is what the worker runtime may ask of a live SGLang process, and
``seams`` is what the patches call back. Importing this package imports neither torch nor
sglang.
"""

SGLANG_VERSION = "0.5.23"

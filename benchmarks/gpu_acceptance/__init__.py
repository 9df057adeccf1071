"""One run on a GPU that shows everything: is it right, how fast is it, and what is nvCOMP really like.

    python -m benchmarks.gpu_acceptance --out DIR [--stand-in] [--step NAME ...] [--seconds 570]

For a host without a network: it needs this repository on PYTHONPATH, torch, CuPy, nvCOMP, zstandard, crc32c, xxhash,
pytest and hypothesis. It makes its states itself, and writes DIR/gpu-acceptance.json, which is all that the documents
need. With `--stand-in` the same steps run small on a CPU; that result says so, and `benchmarks.pages` refuses it.

steps      the steps, most telling first           runner     runs them, each in processes of its own; writes the JSON
child      such a process, probe after probe       host       the GPU or the stand-in; sizes
results    what probes return, tables, targets     made       states
saving     saves and loads on the engine           tampering  frames that no encoder wrote

All other modules are steps, or parts of one. Each has `probes(host)`, which yields names and functions.
"""

"""FEAST in other people's pipelines. Nothing is imported here: each module needs its own packages.

`rounds` needs NumPy alone; `keras_slices` and `trainer` TensorFlow; `flower` and `openfl` their
packages, which cannot be installed beside TensorFlow Federated.
"""

"""The process' environment. Programs import this before anything that imports TensorFlow."""

import os
import warnings

# Worth 2-3x on processors where TensorFlow leaves it off; a user's own value stands.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# TensorFlow's C++ notes, among them errors about GPU plugins on machines without a GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.filterwarnings("ignore", message="pkg_resources is deprecated")

"""What can be built: the elastic space, its index map, its costs and the variant cache."""

from feast_tf.space.cache import VariantCache
from feast_tf.space.cache import load_cache
from feast_tf.space.cache import shipped_cache
from feast_tf.space.costs import LayerCost
from feast_tf.space.costs import layer_table
from feast_tf.space.costs import macs
from feast_tf.space.costs import params
from feast_tf.space.fitness import Architecture
from feast_tf.space.fitness import FitnessSettings
from feast_tf.space.fitness import Score
from feast_tf.space.fitness import score
from feast_tf.space.layout import Block
from feast_tf.space.layout import ConvUnit
from feast_tf.space.layout import Layout
from feast_tf.space.layout import Parameter
from feast_tf.space.layout import layout_of
from feast_tf.space.search import Found
from feast_tf.space.search import Search
from feast_tf.space.spec import SupernetSpec
from feast_tf.space.spec import Variant
from feast_tf.space.spec import paper_spec
from feast_tf.space.spec import round_channels

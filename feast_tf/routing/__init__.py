"""What each client gets: envelopes of affordable variants and their payload."""

from feast_tf.routing.envelopes import Envelope
from feast_tf.routing.envelopes import Routing

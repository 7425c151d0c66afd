"""Object stores: `open_store` gives one run's store, `probe` says whether it can carry a log."""

from everstep_agent.storage.opening import open_store as open_store
from everstep_agent.storage.probe import probe as probe
from everstep_agent.storage.store import ObjectStore as ObjectStore

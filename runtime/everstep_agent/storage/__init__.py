"""Object stores: `open_store` opens one run's store, `probe` tests whether it can hold a run log."""

from everstep_agent.storage.opening import open_store as open_store
from everstep_agent.storage.probe import probe as probe
from everstep_agent.storage.store import ObjectStore as ObjectStore

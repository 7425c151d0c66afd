"""Opens the store of a URI."""

from collections.abc import Mapping

from everstep_agent.storage.address import parse_uri
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_agent.storage.store import ObjectStore


def open_raw(uri: str, run: str, environ: Mapping[str, str], *, create: bool = True) -> ObjectStore:
    """A store without retries; see `open_store`."""
    # Importing obstore takes a tenth of a second: only processes that open a store pay for it.
    from everstep_agent.storage import obstore_store

    address = parse_uri(uri, run)
    if address.scheme == "memory":
        return obstore_store.open_memory()
    if address.scheme == "file":
        return obstore_store.open_folder(address, create=create)
    if address.scheme == "s3":
        return obstore_store.open_s3(address, environ)
    return obstore_store.open_url(address)


def open_store(
    uri: str,
    run: str,
    environ: Mapping[str, str],
    *,
    create: bool = True,
    patience: Patience | None = None,
) -> Retrying:
    """The store of one run, `<uri>/<run>/`. Contacts nothing; `probe` does.

    Args:
        run: may be empty if `uri` is the run's own address.
        environ: for S3 the keys and the endpoint. Without keys, obstore uses the cloud identity.
        create: create the folder of a file:// store if it does not exist.

    Raises:
        BadAddress: the URI, the run's name or a variable is invalid, or the folder does not exist.
    """
    return Retrying(open_raw(uri, run, environ, create=create), patience)

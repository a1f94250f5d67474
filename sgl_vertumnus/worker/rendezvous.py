"""The store where a pool's processes find each other."""

import socket

import torch.distributed as dist

from sgl_vertumnus.config import PoolConfig

_LOOPBACK = "127.0.0.1"  # a pool is one node


def open_store(config: PoolConfig) -> dist.TCPStore:
    """Keep the store, for processes of this machine only.

    Who reaches it can send ranks anywhere. It would listen on all addresses by itself, so it
    is handed a socket.

    Raises:
        OSError: when the port is taken.
    """
    listener = socket.create_server((_LOOPBACK, config.ports.store))
    return dist.TCPStore(
        _LOOPBACK,
        config.ports.store,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

"""Two hosts on one machine run the same programs: the first compiles, and the other takes what it compiled."""


def share_programs() -> None:
    """To be called before the hosts connect. jax thinks that programs for CPUs differ from host to host."""
    import jax
    from jax._src import cache_key

    cache_key._hash_accelerator_config = lambda digest, devices: None
    jax.config.update("jax_share_binary_between_hosts", True)

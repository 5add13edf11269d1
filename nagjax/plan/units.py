"""Numbers formatted for people."""


def gigabytes(size: float) -> str:
    """Bytes in GiB, or in MiB if that is clearer."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"


def scaled(value: float, unit: str = "") -> str:
    """Three digits with a decimal prefix: 1.23 T, 45.6 M."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # 999.5 and more round to 1000
            return f"{value / limit:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def milliseconds(seconds: float) -> str:
    if seconds >= 999.5:  # three digits of more would be an exponent
        return f"{seconds:,.0f} s"
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"

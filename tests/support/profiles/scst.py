"""SCST (SCST-project/scst pull request 228).

Without ``allowed_portal`` its answer to SendTargets has every address of its host: link-local ones,
too, which older versions write with the interface of the target's own host.
"""

from typing import Final

LINK_LOCAL: Final = ("[fe80::f208:aa1a:e598:c5f3%enp0s9]:3260,1", "[fe80::1]:3260,1")

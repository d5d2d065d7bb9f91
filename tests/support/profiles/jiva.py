"""jiva, a storage engine of OpenEBS (openebs-archive/jiva issue 28).

Its portal group is -1, which is no tag: in TargetAddress of its answers to SendTargets, and as
TargetPortalGroupTag of its login responses. open-iscsi takes it as it comes.
"""

from typing import Final

PORTAL_GROUP: Final = -1

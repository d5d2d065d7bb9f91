import sys; sys.path.insert(0,'/tmp/w/mine')
from sub import sub
sub('iserblk/iscsi/login_initiator.py',("# The later connections of a session: what is negotiated for one connection. All other keys are those\n# of the leading login.","# The later connections of a session: what each negotiates for itself. All other keys are those of\n# the leading login."))
sub('iserblk/initiator/connecting/login.py',
('''                credentials=self.credentials,
            )
        )
        outgoing''','''                max_connections=options.connections,
                error_recovery_level=options.error_recovery_level,
                time2retain=TIME2RETAIN_S if options.error_recovery_level == 2 else 0,
                credentials=self.credentials,
            )
        )
        outgoing'''),
('''MPA_TIMEOUT_S = 10.0''','''TIME2RETAIN_S = 20  # at level 2: how long a target is to keep the tasks of a lost connection
MPA_TIMEOUT_S = 10.0'''))

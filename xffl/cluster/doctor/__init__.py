"""What may be wrong with the machines of a job, found out before the job starts.

Each rank of the job, or each host over ssh, answers rank 0 with lines of JSON (:mod:`~xffl.cluster.doctor.agent`). The
checks of one host are in :mod:`~xffl.cluster.doctor.probe`. :mod:`~xffl.cluster.doctor.examine` finds the hosts, asks
them twice (about themselves, then about the others), and :mod:`~xffl.cluster.doctor.compare` judges the answers.
torch is imported by the processes of :mod:`~xffl.cluster.doctor.torch_pair` only.
"""

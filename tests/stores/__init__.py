"""The promises of docs/reliability.md on every kind of storage, whole checkpoints at a time.

    kinds.py    the kinds of storage: where a checkpoint goes, which server is behind it, how it is killed
    places.py   one checkpoint's place, what is saved there, and the questions that are asked afterwards
    calls.py    a hook between the package and the calls of its storage layer
    children.py processes that save and are killed

Each test runs once for each kind: `-m s3`, `-m azure`, `-m gcs`, `-m sftp`, `-m smb`, or `-k "disk or mounted"`. Each
worker of pytest-xdist starts the servers that it needs, once (tests/servers). `mounted` is a directory on any file
system, as NFS, that DCP_NVCOMP_TEST_DIR names; `ceph` is the server that DCP_NVCOMP_TEST_S3 names. What is marked
EVERYWHERE runs on FTP, `memory://` and other storage that fsspec alone reaches as well.

What the servers can't show:

- moto (S3) keeps objects in memory, and runs in the process of the tests: it is not killed itself, but all connections
  to it are. It checks no signatures and knows no rights. Ceph does: it is killed in
  tests/faults/test_object_store_faults.py::test_a_server_killed_and_restarted_during_a_save.
- Azurite knows no throttling, no Azure AD, no hierarchical namespace. It saves its list of blobs every five seconds;
  tests/servers/azurite_durable.js has it do so before it confirms a write, as Azure does. What it has of an upload's
  blocks when it is killed is not what Azure would have.
- gcp-storage-emulator knows no throttling and no IAM but that of its test tokens; what it lacks of preconditions and
  upload sessions is added by tests/servers/gcs_emulator.py, so that our reading of Google's documentation is on both
  sides.
- OpenSSH and Samba are the real servers, on a local disk. No other server's `posix-rename`, and no Windows: its sharing
  modes, leases and virus scanners are not Samba's.
- Nothing here loses power, and the loopback interface has neither latency nor loss but that which wires make.
"""

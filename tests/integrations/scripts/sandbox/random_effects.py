"""Random scripts of calls that change files, start processes and send."""

from __future__ import annotations

import random

# {f}: a file that is there, {d}: a folder that is there, {n}: a new name, {p}: TCP port, {u}: UDP port, {s}: path of a
# unix socket, {a}: abstract one, {k}: number of a process outside, {h}: folder in shared memory
# {host}: another name of the machine
CALLS = [
    "os.setpriority(os.PRIO_USER, 0, 7)",
    "os.rename('/mnt', '/mnt2')",
    "os.symlink({d!r}, '/mnt/memplan-test')",
    "subprocess.run(['unshare', '-Urm', 'sh', '-c', 'mount -t cgroup2 none /mnt; mkdir /mnt/memplan-test'])",
    "[libc.shmctl(number, 0, None) for number in range(64)]",
    "open({f!r}, 'w').write('x')",
    "open({f!r}, 'ab').write(b'x')",
    "open({n!r}, 'x').close()",
    "open({f!r}, 'r+').truncate(0)",
    "io.FileIO({f!r}, 'w').write(b'x')",
    "os.close(os.open({f!r}, os.O_WRONLY | os.O_TRUNC))",
    "os.close(os.open({f!r}, os.O_RDONLY | os.O_TRUNC))",
    "os.truncate({f!r}, 1)",
    "os.remove({f!r})",
    "os.unlink(os.path.basename({f!r}), dir_fd=os.open(os.path.dirname({f!r}), os.O_RDONLY))",
    "os.rename({f!r}, {n!r})",
    "os.replace({f!r}, {f2!r})",
    "os.link({f!r}, {n!r})",
    "os.symlink({f!r}, {n!r})",
    "os.mkdir({n!r})",
    "os.makedirs({n!r} + '/a/b')",
    "os.mkfifo({n!r})",
    "os.rmdir({d!r})",
    "shutil.rmtree({d!r})",
    "shutil.rmtree({h!r})",
    "open({h!r} + '/one', 'w').write('x')",
    "os.remove({h!r} + '/one')",
    "shutil.move({d!r}, {n!r})",
    "shutil.copytree({d!r}, {n!r})",
    "shutil.copy2({f!r}, {f2!r})",
    "shutil.copystat({f!r}, {f2!r})",
    "os.chmod({f!r}, 0o600)",
    "os.chmod({d!r}, 0o700)",
    "os.chown({f!r}, 1234, 1234)",
    "os.utime({f!r}, (1, 1))",
    "os.utime({d!r}, (1, 1))",
    "os.setxattr({f!r}, 'user.memplan', b'1')",
    "os.fchmod(os.open({f!r}, os.O_RDONLY), 0o640)",
    "os.lchown({f!r}, 12, 12)",
    "fcntl.ioctl(os.open({f!r}, os.O_RDONLY), 0x40086602, struct.pack('l', 0x10))",
    "pathlib.Path({f!r}).write_text('x')",
    "pathlib.Path({n!r}).touch()",
    "pathlib.Path({f!r}).unlink()",
    "[os.unlink(name, dir_fd=at) for _, _, names, at in os.fwalk({d!r}) for name in names]",
    "tarfile.open({n!r}, 'w').close()",
    "zipfile.ZipFile({f!r}, 'w').close()",
    "gzip.open({f!r}, 'w').write(b'x')",
    "sqlite3.connect({n!r}).execute('create table t (a)')",
    "shelve.open({n!r}).close()",
    "mmap.mmap(os.open({f!r}, os.O_RDWR), 0).write(b'z')",
    "os.sendfile(os.open({f2!r}, os.O_WRONLY), os.open({f!r}, os.O_RDONLY), 0, 4)",
    "libc.unlink({f!r}.encode())",
    "libc.rename({f!r}.encode(), {n!r}.encode())",
    "libc.truncate({f!r}.encode(), 0)",
    "libc.creat({f!r}.encode(), 0o600)",
    "libc.chmod({f!r}.encode(), 0o600)",
    "libc.system(b'echo x > ' + {f!r}.encode())",
    "libc.open({f!r}.encode(), os.O_RDWR | os.O_TRUNC)",
    "libc.syscall(76, {f!r}.encode(), 0)",
    "os.system('rm -rf {d}')",
    "os.system('touch {f}; chmod 600 {f}; mv {f} {n}')",
    "subprocess.run(['sh', '-c', 'echo y > {f}'])",
    "subprocess.run(['rm', '-rf', {d!r}])",
    "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "os.posix_spawn('/bin/sh', ['sh', '-c', 'sleep 600'], os.environ)",
    "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))",
    "libc.fork() or (time.sleep(600), os._exit(0))",
    "os.fork() or os.execv('/bin/sh', ['sh', '-c', 'echo z > {f}'])",
    "os.forkpty()[0] or os._exit(0)",
    "os.kill({k}, 9)",
    "os.kill({k}, 19)",
    "libc.kill({k}, 9)",
    "signal.pidfd_send_signal(os.pidfd_open({k}), 9)",
    "subprocess.run(['kill', '-9', '{k}'])",
    "os.killpg(os.getpgid({k}), 9)",
    "socket.create_connection(('127.0.0.1', {p}), 2).sendall(b'tcp')",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'udp', ('127.0.0.1', {u}))",
    "connect(socket.AF_UNIX, {s!r}).sendall(b'unix')",
    "connect(socket.AF_UNIX, {a!r}).sendall(b'abstract')",
    "urllib.request.urlopen('http://127.0.0.1:{p}', timeout=2)",
    "asyncio.run(asyncio.open_connection('127.0.0.1', {p}))",
    "subprocess.run(['sh', '-c', 'exec 3<>/dev/tcp/127.0.0.1/{p} && echo x >&3'])",
    "os.chdir({d!r})",
    "open('/proc/sys/kernel/hostname', 'w').write('memplan')",
    "libc.sethostname(b'{host}', 9)",
    "os.chroot({d!r})",
    "libc.mount(b'none', {d!r}.encode(), b'tmpfs', 0, None)",
    "libc.umount2(b'/tmp', 2)",
    "libc.unshare(0x10020000)",
    "open('/proc/%d/oom_score_adj' % {k}, 'w').write('500')",
    "os.setpriority(os.PRIO_PROCESS, {k}, 19)",
    "libc.shmget(0x6d656d70, 4096, 0o1666)",
    "open('/proc/%d/root{f}' % {k}, 'w').write('x')",
    "open('/proc/1/root{f}', 'w').write('x')",
]

OF_THE_MACHINE = ("sethostname", "PRIO_USER", "/mnt", "shmctl", "libc.mount", "umount", "unshare", "/proc/")
"""What calls of root's name that would change the machine itself where nothing holds them."""

HEAD = """
import asyncio, ctypes, fcntl, gzip, io, mmap, os, pathlib, shelve, shutil, signal, socket, sqlite3, struct, subprocess
import tarfile, time, urllib.request, zipfile
libc = ctypes.CDLL(None)
def connect(family, address):
    plug = socket.socket(family)
    plug.connect(address)
    return plug
"""


def script(seed: int, places: dict[str, list[str]], fixed: dict[str, object], *, held: bool = True) -> str:
    """Return a script of a dozen random calls, each of which may fail.

    Args:
        seed: of the choice.
        places: files, folders and new names to choose from, by "f", "d" and "n".
        fixed: what stands for the other letters.
        held: whether something holds it; else it leaves the machine itself alone.
    """
    chosen = random.Random(seed)
    lines = [HEAD]
    for _ in range(12):
        names: dict[str, object] = {key: chosen.choice(found) for key, found in places.items()}
        line = chosen.choice(
            [call for call in CALLS if held or not any(word in call for word in OF_THE_MACHINE)]
        ).format(**names, f2=chosen.choice(places["f"]), **fixed)
        lines.append(f"try: {line}\nexcept Exception as error: pass")
    return "\n".join(lines)

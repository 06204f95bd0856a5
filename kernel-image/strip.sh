#!/bin/sh
# Takes out of the image what a kernel never needs and a hostile cell could use, and makes what is left start fast.
# Runs as root in the build, after the packages are installed. A cell still has Python, sh, coreutils, grep, sed, tar.
set -eu

python=/opt/kernel/bin/python
stdlib="$($python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
packages="$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

echo 'kernel:x:10001:' >> /etc/group
echo 'kernel:x:10001:10001:kernel:/tmp/home:/bin/sh' >> /etc/passwd

# Installers: there is no network and no place to install to. ensurepip carries a copy of pip.
rm -rf "$stdlib"/ensurepip "$stdlib"/idlelib "$stdlib"/turtledemo "$stdlib"/site-packages/* \
    /usr/share/python-wheels /usr/lib/python3/dist-packages

# Programs of the administrator; ldconfig stays, by which ctypes finds libraries.
find /usr/sbin/ /usr/local/sbin/ /sbin/ ! -type d ! -name ldconfig -delete

# Programs that install, compile, reach a network or change users, by whatever base brought them.
for name in 'pip*' 'idle*' 'pydoc*' '2to3*' 'python*-config' 'py3*' 'apt*' 'dpkg*' 'debconf*' 'deb-*' 'perl*' 'update-*' \
    cc 'gcc*' 'c++*' 'g++*' 'cpp*' 'clang*' as ld 'ld.*' make gdb \
    curl wget nc 'nc.*' ncat netcat socat telnet ftp ssh 'ssh-*' scp sftp rsync git openssl c_rehash 'gpg*' \
    su sg login newgrp passwd chsh chfn chage expiry gpasswd mount umount unshare nsenter setpriv; do
    find /usr/bin/ /usr/local/bin/ /bin/ -name "$name" ! -type d -delete
done
rm -rf /etc/apt /etc/cron.* /usr/share/bug /var/lib/apt /var/lib/dpkg/info /var/cache/* /var/log/* /root/.cache \
    /usr/lib/apt /usr/lib/dpkg /usr/lib/gcc /usr/lib/*/libapt* /usr/lib/*/perl* /usr/share/perl* /usr/share/debconf \
    /usr/include /usr/local/include /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale

# Test suites, C headers and sources, extensions of JupyterLab.
find "$stdlib" "$packages" -depth -type d \( -name tests -o -name test \) -exec rm -rf {} +
find "$packages" -type f \( -name '*.[cha]' -o -name '*.[ch]pp' -o -name '*.p[xy][dix]' \) -delete
rm -rf /opt/kernel/include /opt/kernel/etc /opt/kernel/share/man "$packages"/plotly/labextension \
    /opt/kernel/share/jupyter/labextensions /opt/kernel/share/jupyter/nbextensions

# no-new-privileges makes them useless; not having them makes sure.
find / -xdev -perm /6000 -exec chmod ug-s {} +

# Matplotlib searches for fonts when it finds no list of them, at the first plot of every kernel.
mkdir -p /opt/kernel/share/cellgate/matplotlib /work
MPLCONFIGDIR=/opt/kernel/share/cellgate/matplotlib $python -c 'import matplotlib.font_manager'

# A read-only root can never store byte code later: without it a kernel takes four times as long to start. Unchecked,
# because the copying of layers need not keep the times by which it would be checked.
find "$stdlib" "$packages" -depth -type d -name __pycache__ -exec rm -rf {} +
$python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$stdlib" "$packages"

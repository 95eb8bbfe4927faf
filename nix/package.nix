# The programs, units, man pages and completions, as install.sh installs them. Needs the Go release that go.mod names, or a later one.
{
  lib,
  buildGoModule,
  version ? "0.0.0",
}:

buildGoModule {
  pname = "berth";
  inherit version;
  src = lib.cleanSource ../.;
  # Of "go mod vendor": go test ./nix says what it has to be.
  vendorHash = "sha256-qF1EWltctY53EJAhImYYZqRkspsoF71doCy8HtsT2b0=";

  # install.sh is the one place that knows what is built and where it goes.
  buildPhase = ''
    runHook preBuild
    export PREFIX=$out SYSTEMD_PREFIX=$out SYSCONFDIR=$out/etc VERSION=${version}
    sh ./install.sh build
    runHook postBuild
  '';
  installPhase = ''
    runHook preInstall
    sh ./install.sh install
    runHook postInstall
  '';
  # The tests need Debian, a systemd host and root: they run where the source is worked on.
  doCheck = false;

  meta = {
    description = "Kubernetes nodes in systemd-nspawn slots";
    license = lib.licenses.asl20;
    platforms = [
      "x86_64-linux"
      "aarch64-linux"
    ];
    mainProgram = "berth";
  };
}

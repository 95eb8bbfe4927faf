# NixOS module: services.berth.
{
  config,
  lib,
  pkgs,
  ...
}:

let
  cfg = config.services.berth;
  toml = pkgs.formats.toml { };
  goal = toml.generate "goal.toml" cfg.goal;
in
{
  options.services.berth = {
    enable = lib.mkEnableOption "Kubernetes nodes in systemd-nspawn slots";

    package = lib.mkOption {
      type = lib.types.package;
      default = pkgs.callPackage ./package.nix { };
      defaultText = lib.literalExpression "pkgs.callPackage ./package.nix { }";
      description = "The berth package.";
    };

    goal = lib.mkOption {
      type = lib.types.nullOr (lib.types.attrsOf toml.type);
      default = null;
      example = lib.literalExpression ''
        {
          boot = "a";
          cluster.server = "https://10.0.0.1:6443";
          cluster.certificate_authority = "/etc/berth/ca.crt";
          kubelet.bootstrap_token_file = "/run/keys/bootstrap-token";
          slot.a = { };
        }
      '';
      description = ''
        The goal state, as berth.toml(5) describes it; it is checked when the system is built, and becomes /etc/berth/goal.toml.
        null: that file is left to others. Everybody can read it, so a secret belongs into a file that it names.
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    environment.systemPackages = [ cfg.package ];

    environment.etc = {
      "sysctl.d/90-berth.conf".source = "${cfg.package}/lib/sysctl.d/90-berth.conf";
      "modules-load.d/berth.conf".source = "${cfg.package}/lib/modules-load.d/berth.conf";
      "berth/goal.toml" = lib.mkIf (cfg.goal != null) {
        source = pkgs.runCommand "goal.toml" { inherit goal; } ''
          ${cfg.package}/bin/berth check $goal
          cp $goal $out
        '';
      };
    };

    systemd.packages = [ cfg.package ];
    systemd.generators.berth-generator = "${cfg.package}/lib/systemd/system-generators/berth-generator";
    systemd.tmpfiles.packages = [ cfg.package ];

    # nixos-rebuild switch would restart units that have changed, and with them nodes: whoever wants that restarts node@SLOT.
    systemd.services = lib.genAttrs [
      "berth-last-good"
      "node@"
      "node-peer-guard@"
      "node-render-nspawn@"
      "node-render-containerd@"
      "node-render-kubelet@"
      "node-wait-dbus@"
      "node-nvidia-wire@"
      "node-containerd@"
      "node-kubelet@"
      "node-record-applied@"
      "systemd-nspawn@"
    ] (_: { restartIfChanged = false; });
  };
}
